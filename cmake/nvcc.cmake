# Runs nvcc for cmake/cuda.cmake: -fatbin through ccache where that is, with what ptxas reports of each kernel in a file of its own.
#   NVCC, VERSION, CCACHE (or empty), BASE (root of the sources), SOURCE, INCLUDE, ARCHITECTURES (a list), OUT, REPORT
#
# -c beside -fatbin changes nothing for nvcc, and tells ccache that this is one compilation.
set(launcher "")
if(CCACHE)
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${BASE} CCACHE_NOHASHDIR=true ${CCACHE})
endif()
execute_process(
  COMMAND ${launcher} ${NVCC} -fatbin -c -O3 -std=c++20 -I${INCLUDE} ${ARCHITECTURES} --split-compile 0 -Xptxas -v
    -MD -MF ${OUT}.d -MT ${OUT} ${SOURCE} -o ${OUT}
  ERROR_VARIABLE errors OUTPUT_VARIABLE words RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "nvcc failed (${status}) on ${SOURCE}:\n${words}${errors}")
endif()
file(WRITE ${REPORT} "nvcc release ${VERSION}\n${words}${errors}")
