"""`sie mcp`: the Model Context Protocol for agents, as a client of the gateway.

agent ──stdio | HTTP──► server ──► tools ──► SIEAsyncClient with the caller's key ──► gateway
                                     └──► results, which an agent reads in pages

config      file with default models and the collections that agents may search
callers     the caller of a request, and the names of API keys, which the gateway returns
clients     clients of the gateway, one for each API key
schemas     arguments and answers of the tools, with their bounds
results     results that are too long for an answer
tools       the tools
sentences   errors of the gateway as sentences for an agent
server      the handlers of the protocol: tools, and resources by URI
http        the HTTP transport

A new tool has its arguments and answer in `schemas`, its function and its texts in `tools`.

Places that refuse a call for lack of room:

    server.AgentServer._refusing  ToolRefused  calls in progress, of a caller or of all
    tools.AgentTools              ToolRefused  documents that are parsed at once
    http._Sessions                (no code)    sessions, of a key or of all keys
"""
