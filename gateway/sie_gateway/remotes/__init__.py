"""Remote servers that answer for a model when this cluster has no capacity ([docs/remote.md](docs/remote.md)).

    configuration ── SIE_REMOTES ──► RemoteServer
    client        ── texts over HTTP to a server of SIE, TEI or the OpenAI shape ──► checked vectors
    proof         ── probe texts, their reference vectors, the comparison ──► Proof, or Deviates
    budget        ── tokens of a month over all gateways
    remotes       ── probes in the background, and the answer in place of a refusal

A client's request is sent to a remote server only if this cluster cannot answer it and the client would get an error.
"""
