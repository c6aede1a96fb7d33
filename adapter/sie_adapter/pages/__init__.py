"""Model classes of the language models that read images, for `families/vision_language.py`."""
