"""The part of Kubernetes that a chart is rendered for, on one machine: real containers by podman, a network namespace
for each pod, the cluster's services and policies in nftables.

    helm template ──► Node.apply ──► Pods (network.py: addresses, services, policies)
                                       └─► Containers (engine.py: podman; each kept as a kubelet keeps it)

Every rendered field is obeyed or refused: a test with a field that was ignored would pass without a reason.
"""

from kubelet.containers import Container, Exit
from kubelet.node import Node
from kubelet.pods import Pod

__all__ = ["Container", "Exit", "Node", "Pod"]
