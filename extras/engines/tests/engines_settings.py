"""Rows of this extra in the tables of settings (`of_extras`)."""

DOCUMENTED = {"SIE_SGLANG_PYTHON": ("(unset)", "/opt/sglang/bin/python")}
EFFECTS = {"SIE_SGLANG_PYTHON": "extras/engines/tests/unit/test_sglang.py::test_the_setting_names_the_environment"}
