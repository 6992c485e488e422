"""What every other folder stands on: errors, options of user code, what flows through a
step, processes and engines.
"""
