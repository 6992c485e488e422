"""The lab: what the papers need beside training. It imports the core; nothing of the
core imports it.
"""
