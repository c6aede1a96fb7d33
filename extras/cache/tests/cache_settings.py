"""Rows of this extra in the tables of settings (`of_extras`)."""

_CACHED = "extras/cache/tests/unit/test_cached.py"
DOCUMENTED = {"SIE_CACHE_BYTES": ("0", "1048576", ("-1", "1g", "")), "SIE_CACHE_TTL_S": ("3600", "1", ("0", "1h", ""))}
EFFECTS = {
    "SIE_CACHE_BYTES": f"{_CACHED}::test_a_gateway_answers_repeated_inputs_without_a_worker",
    "SIE_CACHE_TTL_S": f"{_CACHED}::test_an_answer_is_computed_again_after_its_time",
}
