"""Families that read images beside texts: dual encoders, encoders and rerankers of pages and images, and detectors."""
