"""Rows of this extra in the tables of settings (`of_extras`)."""

DOCUMENTED = {"SIE_SGLANG_PYTHON": ("(unset)", "/opt/sglang/bin/python")}
