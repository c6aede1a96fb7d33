"""Hourly work of a gateway, done at once by a separate process: delete idle consumers, or remove old payloads.

python tests/chore.py consumers nats://127.0.0.1:4222 --failpoints gateway.consumer_deleted=crash
python tests/chore.py payloads /folder/payloads --failpoints payloads.before_removal=crash
"""

from __future__ import annotations

import argparse
import asyncio
import time

from inprocess import settings_of

from sie_broker.nats import connect
from sie_gateway.streams.publish import WorkConsumers
from sie_runtime import failpoints
from sie_store.payloads import open_store

OLD_S = 3600.0


async def consumers(url: str) -> int:
    """Delete the consumers of the default pool that are idle now."""
    broker = await connect(url, name="chore")
    try:
        work_consumers = WorkConsumers(broker, settings_of(SIE_ACK_WAIT_S="3"), idle_s=0.0)
        stream = await work_consumers.follow("_default")
        return await stream.sweep(3.0)
    finally:
        await broker.close()


async def payloads(folder: str) -> int:
    store = open_store(folder)
    assert store is not None
    return await store.sweep(older_than_s=OLD_S, now_s=time.time(), timeout_s=10.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chore", choices=["consumers", "payloads"])
    parser.add_argument("where")
    parser.add_argument("--failpoints", default="")
    options = parser.parse_args()
    failpoints.arm(options.failpoints)
    print(asyncio.run({"consumers": consumers, "payloads": payloads}[options.chore](options.where)))


if __name__ == "__main__":
    main()
