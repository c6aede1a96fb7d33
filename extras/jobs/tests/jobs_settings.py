"""Rows of this extra in the tables of settings (`of_extras`)."""

_JOBS, _FILES = (f"extras/jobs/tests/unit/test_{name}.py" for name in ("jobs", "files"))
DOCUMENTED = {
    "SIE_JOBS_URLS": ("(unset)", "s3://bucket/a,/mnt/jobs", (",", "ftp://host/x", "s3://a,gs://")),
    "SIE_JOBS_SINKS": (
        "(unset)",
        "main=qdrant://host:6333,pg=postgresql://user:canary-9f31@host/db",
        (
            ",",
            "main",
            "main=",
            "=qdrant://host",
            "a b=qdrant://host",
            "a=qdrant://h,a=qdrant://h",
            "a=qdrant://h:x",
            "a=postgresql:///db",
        ),
    ),
    "SIE_JOBS_AT_ONCE": ("4", "0", ("-1", "x", "")),
    "SIE_JOBS_KEEP_S": ("2592000", "60", ("59", "1d", "")),
    "SIE_JOBS_PER_KEY": ("1000", "1", ("0", "x", "")),
    "SIE_JOBS_BYTES_PER_KEY": ("4194304", "65536", ("65535", "4m", "")),
    "SIE_MAX_JOBS": ("10000", "1", ("0", "x", "")),
    "SIE_MAX_JOBS_BYTES": ("67108864", "65536", ("65535", "64m", "")),
    "SIE_FILES_PER_KEY": ("10000", "1", ("0", "x", "")),
    "SIE_FILES_BYTES_PER_KEY": ("68719476736", "1048576", ("1048575", "1g", "")),
    "SIE_MAX_FILES": ("100000", "1", ("0", "x", "")),
    "SIE_MAX_FILES_BYTES": ("1099511627776", "1048576", ("1048575", "1t", "")),
    "SIE_JOBS_CACHE_BYTES": ("4294967296", "0", ("-1", "1g", "")),
}
EFFECTS = {
    "SIE_JOBS_URLS": f"{_JOBS}::test_a_job_reads_and_writes_below_the_named_places_alone",
    "SIE_JOBS_SINKS": f"{_JOBS}::test_a_job_names_a_database_of_the_installation",
    "SIE_JOBS_AT_ONCE": f"{_JOBS}::test_a_gateway_runs_so_many_jobs_at_once",
    "SIE_JOBS_KEEP_S": f"{_JOBS}::test_a_job_that_has_ended_is_forgotten_after_a_time_with_what_it_kept",
    "SIE_JOBS_PER_KEY": f"{_JOBS}::test_jobs_are_bounded_by_number_for_a_key_and_in_all",
    "SIE_JOBS_BYTES_PER_KEY": f"{_JOBS}::test_records_of_jobs_are_bounded_by_bytes",
    "SIE_MAX_JOBS": f"{_JOBS}::test_jobs_are_bounded_by_number_for_a_key_and_in_all",
    "SIE_MAX_JOBS_BYTES": f"{_JOBS}::test_records_of_jobs_are_bounded_by_bytes",
    "SIE_FILES_PER_KEY": f"{_FILES}::test_a_gateway_bounds_files_by_its_settings",
    "SIE_FILES_BYTES_PER_KEY": f"{_FILES}::test_a_gateway_bounds_files_by_its_settings",
    "SIE_MAX_FILES": f"{_FILES}::test_a_gateway_bounds_files_by_its_settings",
    "SIE_MAX_FILES_BYTES": f"{_FILES}::test_a_gateway_bounds_files_by_its_settings",
    "SIE_JOBS_CACHE_BYTES": f"{_JOBS}::test_what_changed_is_computed_where_answers_are_kept",
}
SECRETS = ("SIE_JOBS_SINKS",)  # its legal value has the canary of test_settings.py
