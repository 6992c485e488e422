"""Dual encoders of images and text, for rewards that compare a caption with its image
in one embedding space.
"""
