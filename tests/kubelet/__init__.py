"""The part of Kubernetes that a chart is rendered for, on one machine: real containers by podman, a network namespace
for each pod, the cluster's services and policies in nftables.

    helm template ──► Node.apply ──► Pods (network.py: addresses, services, policies)
                                       └─► Containers (engine.py: podman; each kept as a kubelet keeps it)

What is rendered is obeyed, and what is rendered but not known here is refused: a field that is silently left out would
make a test pass for nothing.
"""

from kubelet.containers import Container, Exit
from kubelet.node import Node
from kubelet.pods import Pod

__all__ = ["Container", "Exit", "Node", "Pod"]
