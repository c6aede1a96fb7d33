"""Items become rows for the device: texts are tokenised, long texts are cut, images and sounds are decoded in processes
of `media_pool`. `prepare` is the door; media are entered only for items that have them.
"""
