"""Work items from the broker: `pull` requests messages from the consumers of a lane (pool, machine profile and bundle);
`intake` decodes the messages and gathers their work items.
"""
