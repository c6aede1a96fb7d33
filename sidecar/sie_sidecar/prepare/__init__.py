"""Work items become rows for the device: texts are tokenised, long texts are cut, images and sounds are decoded in the
processes of `media_pool`. `prepare` is the entry; the modules for media run only for items that have media.
"""
