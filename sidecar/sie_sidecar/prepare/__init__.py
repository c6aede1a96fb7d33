"""Conversion of work items to rows of token ids for the device. Texts are tokenised, long texts are truncated, and
images and sounds are decoded in separate processes. The entry point is `prepare.Prepare`. The modules for images and
sounds are used only for items with images or sounds.
"""
