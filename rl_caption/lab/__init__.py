"""The lab: programs of the papers beside training. It imports the core; nothing of the
core imports it.
"""
