"""Remote servers that compute a model's vectors when this cluster has no capacity ([docs/remote.md](docs/remote.md)).

    configuration ── SIE_REMOTES ──► RemoteServer
    client        ── texts over HTTP to a server of SIE, TEI or the OpenAI shape ──► checked vectors
    proof         ── probe texts, their reference vectors, the comparison ──► Proof, or Deviates
    budget        ── tokens of a month over all gateways
    remotes       ── probes in the background, and the vectors for a request that this cluster refuses

A client's request is sent to a remote server only if this cluster has refused it for lack of capacity.
"""
