"""Remote servers that answer for a model when this cluster has no room ([docs/remote.md](docs/remote.md)).

    configuration ── SIE_REMOTES ──► RemoteServer
    client        ── texts over HTTP to a server of SIE, TEI or the OpenAI shape ──► checked vectors
    proof         ── probe texts, their reference vectors, the comparison ──► Proof, or the figure of the refusal
    budget        ── tokens of a month over all gateways
    remotes       ── probes in the background, and the answer in place of a refusal

Only `remotes` is called from outside, and only after a request was refused.
"""
