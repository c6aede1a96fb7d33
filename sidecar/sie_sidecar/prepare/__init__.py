"""Conversion of work items to rows for the device: texts are tokenised, long texts are truncated, images and sounds are
decoded in the processes of `media_pool`. `prepare` is the entry; the modules for media run only for items that have
media.
"""
