"""Commands of operators: the faults of a cluster, its streams, its dead letters, backup and repair.

doctor/    `sie doctor`
topology   `sie topology`: streams and consumers at the broker
dlq        `sie dlq`: dead letters
recovery   `sie backup`, `sie restore`, `sie repair`
"""
