"""Images, sounds and documents: their sizes, formats and costs."""
