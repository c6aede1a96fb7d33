#!/bin/sh
# Delete files that no process of SIE reads from an environment. $1: its folder.
set -eu
python=$1/bin/python
cd "$1"/lib/python3*/site-packages

# tests, files for compiling extensions, and numpy's tools for Fortran, which stay if scipy is installed, because it imports them
find . -depth -type d \( -name tests -o -path ./numpy/distutils -o -path ./torch/test -o -path ./torch/include \) -exec rm -r {} +
[ -d scipy ] || rm -r numpy/f2py
find . -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.a' \) -delete
find . -type f -path './torch/bin/*' ! -name torch_shm_manager -delete

# tools of onnxruntime that convert models; gliner imports only the runtime
[ ! -d onnxruntime ] || rm -r onnxruntime/tools onnxruntime/transformers

# plugins of OpenVINO for other devices than CPUs, and its readers of other formats than PyTorch's and its own
[ ! -d openvino ] || find openvino/libs -type f -regextype egrep \
    -regex '.*(intel_gpu_plugin|intel_npu_plugin|npu_.*|(onnx|tensorflow|tensorflow_lite|paddle|gguf|jax)_frontend)\.so.*' -delete
[ ! -d openvino ] || rm -f openvino/libs/cache.json

# names of places, networks and time zones in phonenumbers: 43 MB that no process imports
[ ! -d phonenumbers ] || rm -r phonenumbers/geodata phonenumbers/carrierdata phonenumbers/tzdata
# C++ headers of pyarrow, its Flight protocol, and its clients of object stores, in place of which SIE uses obstore
[ ! -d pyarrow ] || find pyarrow -type f -regextype egrep \
    -regex 'pyarrow/(include/.*|libarrow_(python_)?flight\.so.*|libarrow_s3\.so.*|_(flight|s3fs|gcsfs|azurefs|hdfs)\..*)' -delete
[ ! -d pyarrow ] || find pyarrow -type l -name '*flight*' -delete

# the library of bpe-openai; only its vocabularies are read
[ ! -d bpe_openai ] || rm bpe_openai/*.so

# symbols of large extension modules; the modules of numpy and torch do not work without theirs
find . -regex './\(uvloop\|yaml\|tokenizers\|obstore\|httptools\)/.*\.so' -exec strip --strip-unneeded {} +

# Bytecode only of the modules that a start imports: delete all bytecode of large packages, then import these modules. A start needs
# few of the 400 families of transformers.
if [ -d transformers ]; then
    find transformers/models gliner2 networkx pydantic scipy sklearn sympy -depth -type d -name __pycache__ -exec rm -r {} +
    env -u PYTHONDONTWRITEBYTECODE "$python" -c "import gliner, gliner2.inference.engine, gliclass, transformers"
fi
