# The CUDA backend: whether it is in this build, and its kernels. Included by cpp/CMakeLists.txt.
#
# What the build needs is nvcc and <cuda.h>, from a toolkit (PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda) or from PyPI wheels in the virtual
# environment of the Python that builds (VIRTUAL_ENV, or .venv): the extra "cuda-build" of pyproject.toml, which tools/setup.sh puts there where there
# is no toolkit. Nothing of CUDA is linked: the driver and cuBLASLt are opened at run time.
#
# nvcc is found and run directly, not as a CMake language: CUDA as a language wants a compiler that links programs, which the wheels don't
# have, and would put its runtime into every target.
#
# Sets PARAMWIRE_CUDA_FOUND (what the summary line says), PARAMWIRE_NVCC, and the target paramwire_cuda_headers.
set(PARAMWIRE_CUDA_FOUND OFF)
if(NOT PARAMWIRE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "PARAMWIRE_CUDA is '${PARAMWIRE_CUDA}'; AUTO, ON or OFF")
endif()
if(PARAMWIRE_CUDA STREQUAL "OFF")
  return()
endif()

file(GLOB paramwire_cuda_wheels LIST_DIRECTORIES true
  "$ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/cu13" "${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu13")
find_program(PARAMWIRE_NVCC nvcc
  HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda ${paramwire_cuda_wheels} PATH_SUFFIXES bin)
mark_as_advanced(PARAMWIRE_NVCC)
if(PARAMWIRE_NVCC)
  # nvcc says where it lies: it may be a script or a link in PATH.
  execute_process(COMMAND ${PARAMWIRE_NVCC} --dryrun -x cu -E /dev/null
    ERROR_VARIABLE paramwire_nvcc_says OUTPUT_QUIET RESULT_VARIABLE paramwire_nvcc_status)
  string(REGEX MATCH "TOP=([^\n]+)" paramwire_nvcc_top "${paramwire_nvcc_says}")
  set(paramwire_nvcc_top "${CMAKE_MATCH_1}")
  execute_process(COMMAND ${PARAMWIRE_NVCC} --version OUTPUT_VARIABLE paramwire_nvcc_version ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" paramwire_nvcc_version "${paramwire_nvcc_version}")
  set(paramwire_nvcc_version "${CMAKE_MATCH_1}")
  find_path(CUDA_INCLUDE_DIR cuda.h PATHS ${paramwire_nvcc_top} ENV CUDA_HOME ENV CUDA_PATH ${paramwire_cuda_wheels} PATH_SUFFIXES include NO_DEFAULT_PATH)
  mark_as_advanced(CUDA_INCLUDE_DIR)
endif()

set(paramwire_cuda_missing "")
if(NOT PARAMWIRE_NVCC)
  set(paramwire_cuda_missing "nvcc, in PATH, CUDA_HOME/bin or the virtual environment (PyPI: nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm, nvidia-cuda-runtime, all 13.0.*: the extra cuda-build)")
elseif(NOT paramwire_nvcc_status EQUAL 0 OR NOT paramwire_nvcc_version)
  set(paramwire_cuda_missing "an nvcc that works: ${PARAMWIRE_NVCC} says '${paramwire_nvcc_says}'")
elseif(paramwire_nvcc_version VERSION_LESS 13.0)
  set(paramwire_cuda_missing "nvcc 13.0 or newer: ${PARAMWIRE_NVCC} is ${paramwire_nvcc_version}")
elseif(NOT CUDA_INCLUDE_DIR)
  set(paramwire_cuda_missing "cuda.h beside ${PARAMWIRE_NVCC} (PyPI: nvidia-cuda-runtime)")
endif()
if(paramwire_cuda_missing)
  if(PARAMWIRE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PARAMWIRE_CUDA=ON needs, and cannot find: ${paramwire_cuda_missing}")
  endif()
  message(STATUS "no CUDA backend: needs ${paramwire_cuda_missing}")
  return()
endif()
set(PARAMWIRE_CUDA_FOUND "nvcc ${paramwire_nvcc_version}")

add_library(paramwire_cuda_headers INTERFACE)
target_include_directories(paramwire_cuda_headers SYSTEM INTERFACE ${CUDA_INCLUDE_DIR})

# Kernels for the architectures that are tuned for, and PTX for those that come later. Each takes about 9 s of CPU.
set(paramwire_cuda_architectures
  -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -gencode arch=compute_100,code=[sm_100,compute_100])
set(PARAMWIRE_CUDA_FATBIN ${CMAKE_CURRENT_BINARY_DIR}/cuda/kernels.fatbin)
set(paramwire_cuda_source ${CMAKE_CURRENT_SOURCE_DIR}/cpp/paramwire/cuda/kernels/kernels.cu)
file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/cuda)
# The depfile names every header, the toolkit's too; what ptxas says of registers and spills goes to kernels.ptxas, which
# tools/cuda_kernels.py makes docs/cuda-kernels.md of.
add_custom_command(
  OUTPUT ${PARAMWIRE_CUDA_FATBIN} ${CMAKE_CURRENT_BINARY_DIR}/cuda/kernels.ptxas
  COMMAND ${CMAKE_COMMAND} -DNVCC=${PARAMWIRE_NVCC} -DVERSION=${paramwire_nvcc_version} -DCCACHE=${PARAMWIRE_CCACHE} -DBASE=${CMAKE_CURRENT_SOURCE_DIR}
    -DSOURCE=${paramwire_cuda_source} -DINCLUDE=${CMAKE_CURRENT_SOURCE_DIR}/cpp "-DARCHITECTURES=${paramwire_cuda_architectures}"
    -DOUT=${PARAMWIRE_CUDA_FATBIN} -DREPORT=${CMAKE_CURRENT_BINARY_DIR}/cuda/kernels.ptxas
    -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/nvcc.cmake
  DEPENDS ${paramwire_cuda_source} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/nvcc.cmake
  DEPFILE ${PARAMWIRE_CUDA_FATBIN}.d
  COMMENT "Compiling CUDA kernels by ${PARAMWIRE_CUDA_FOUND}"
  VERBATIM)

# The image is assembled, so that a megabyte of bytes is no C array.
enable_language(ASM)
set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/cpp/paramwire/cuda/kernels/image.S PROPERTIES
  COMPILE_DEFINITIONS PARAMWIRE_CUDA_FATBIN="${PARAMWIRE_CUDA_FATBIN}"
  COMPILE_OPTIONS -Wno-unused-command-line-argument  # clang: sanitizers and the like mean nothing to an assembler
  OBJECT_DEPENDS ${PARAMWIRE_CUDA_FATBIN})
