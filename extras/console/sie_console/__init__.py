"""The console: the page of a gateway at `/`, and the routes that tell people about the cluster and its requests.

 a request ends ──► history.py: the last hour, the slowest requests, lines of the log
 workers, queues ──► overview.py, summary.py, findings.py: what is there, what is wrong, and how to mend it
 a change of a model ──► config_forward.py ──► config service

The sources of the page are in `page/` beside this package, its built files in `built/`.
"""
