"""Jobs, batches and files: a model runs on all rows of files with the priority bulk. The answers are files, or vectors
in a database.

records     records of jobs and files at the broker
gateway/    the plug-in of the gateway: routes, files, and the run of jobs
datasets/   input and output of jobs
sinks/      vector databases
command/    `sie jobs`
settings, metrics
"""
