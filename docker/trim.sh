#!/bin/sh
# Takes out of an environment what no process of ours reads. $1: the environment.
set -eu
python=$1/bin/python
cd "$1"/lib/python3*/site-packages

# tests, what is there for extensions to be compiled, and numpy's tools for Fortran, which scipy imports
find . -depth -type d \( -name tests -o -path ./numpy/distutils -o -path ./torch/test -o -path ./torch/include \) -exec rm -r {} +
[ -d scipy ] || rm -r numpy/f2py
find . -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.a' \) -delete
find . -type f -path './torch/bin/*' ! -name torch_shm_manager -delete

# what onnxruntime, which gliner imports, has to make models of other formats
[ ! -d onnxruntime ] || rm -r onnxruntime/tools onnxruntime/transformers

# of OpenVINO what runs on other devices, and reads models of other kinds than PyTorch's and its own
[ ! -d openvino ] || find openvino/libs -type f -regextype egrep \
    -regex '.*(intel_gpu_plugin|intel_npu_plugin|npu_.*|(onnx|tensorflow|tensorflow_lite|paddle|gguf|jax)_frontend)\.so.*' -delete
[ ! -d openvino ] || rm -f openvino/libs/cache.json

# of phonenumbers where numbers belong to: 43 MB of names of places, networks and time zones, of which nothing is imported
[ ! -d phonenumbers ] || rm -r phonenumbers/geodata phonenumbers/carrierdata phonenumbers/tzdata
# of pyarrow what is for C++, for a protocol of its own and for stores, which obstore reads
[ ! -d pyarrow ] || find pyarrow -type f -regextype egrep \
    -regex 'pyarrow/(include/.*|libarrow_(python_)?flight\.so.*|libarrow_s3\.so.*|_(flight|s3fs|gcsfs|azurefs|hdfs)\..*)' -delete
[ ! -d pyarrow ] || find pyarrow -type l -name '*flight*' -delete

# of bpe-openai all but its vocabularies
[ ! -d bpe_openai ] || rm bpe_openai/*.so

# the symbols of the extension modules that have most of them; numpy's and torch's do not bear it
find . -regex './\(uvloop\|yaml\|tokenizers\|obstore\|httptools\)/.*\.so' -exec strip --strip-unneeded {} +

# byte code of what a start loads, a few of the 400 families of transformers and parts of what computes, and of no more
if [ -d transformers ]; then
    find transformers/models gliner2 networkx pydantic scipy sklearn sympy -depth -type d -name __pycache__ -exec rm -r {} +
    env -u PYTHONDONTWRITEBYTECODE "$python" -c "import gliner, gliner2.inference.engine, gliclass, transformers"
fi
