"""Engines beside torch: graphs of OpenVINO on a CPU, and servers of SGLang."""
