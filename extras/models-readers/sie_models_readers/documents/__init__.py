"""Documents to Markdown, in processes of their own."""
