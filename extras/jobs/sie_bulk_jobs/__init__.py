"""Jobs, batches and files: a model runs on all rows of files with the priority bulk. The answers are files, or vectors
in a database.

plugin, settings, metrics   what processes load
records                     records of jobs and files at the broker
file_objects                the bytes of files in the payload store
gateway/                    routes, files, and the run of jobs
datasets/                   input and output of jobs
sinks/                      vector databases
command/                    `sie jobs`
"""
