"""Work that outlives a request, and the files that it reads and writes.

records.py      the bucket of jobs and files, followed by every gateway
form.py         multipart/form-data, as it arrives
files.py        files: bytes in the payload store, a record of each in the bucket
file_routes.py  OpenAI's routes of files
"""
