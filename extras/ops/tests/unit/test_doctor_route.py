"""The report of `sie doctor` that a gateway answers."""

from __future__ import annotations

import asyncio

import pytest
from inprocess import free_port, settings_of

from sie_contracts.errors import Unauthenticated
from sie_gateway.http.app import Gate
from sie_ops.doctor.runs import Doctor


async def test_the_doctor_reports_as_the_command_does() -> None:
    """Two concurrent requests share one examination, which looks at the gateway that runs it."""
    doctor = Doctor("0.0.0.0", free_port(), None)
    report, second_report = await asyncio.gather(doctor.report(), doctor.report())
    assert report is second_report
    checks = {check["check"]: check for check in report["checks"]}
    assert {"settings", "gateway", "broker", "streams", "config", "disk", "clock", "versions"} <= set(checks)
    (nobody,) = checks["gateway"]["findings"]
    assert doctor._environ["SIE_GATEWAY_URL"] in nobody["wrong"]
    assert nobody["fix"]


ADMIN = {"SIE_ADMIN_TOKEN": "admin-token-of-a-test"}
STATIC = {**ADMIN, "SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": "user-token-of-a-test"}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_doctor_needs_no_token_where_only_this_machine_reaches_a_gateway_without_tokens(host: str) -> None:
    Gate(settings_of(**ADMIN), None, host).check("GET", "/v1/doctor", "")
    with pytest.raises(Unauthenticated):
        Gate(settings_of(**ADMIN), None, host).check("GET", "/v1/dead-letters", "")
    with pytest.raises(Unauthenticated):
        Gate(settings_of(**STATIC), None, host).check("GET", "/v1/doctor", "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gateway", ""])
def test_the_doctor_needs_a_token_where_others_reach_the_gateway(host: str) -> None:
    with pytest.raises(Unauthenticated):
        Gate(settings_of(**ADMIN), None, host).check("GET", "/v1/doctor", "")
