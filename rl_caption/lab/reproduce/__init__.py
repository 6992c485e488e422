"""Tables of the five papers that this package follows, made again: published value,
measured value, difference.
"""
