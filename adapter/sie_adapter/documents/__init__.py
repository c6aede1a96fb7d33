"""Documents are parsed by Docling in processes of their own."""
