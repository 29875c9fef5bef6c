# Installs the build into an empty prefix, copies the example away from the tree, and configures, builds and runs it there.
# The copy is the point: no header or source of the tree can be reached from it by accident.
file(REMOVE_RECURSE ${WORK_DIR})
set(prefix ${WORK_DIR}/prefix)
file(COPY ${EXAMPLE_DIR}/ DESTINATION ${WORK_DIR}/example)

function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${status}:\n${output}")
  endif()
  set(step_output "${output}" PARENT_SCOPE)
endfunction()

step(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix} --component devel)
step(${CMAKE_COMMAND} -S ${WORK_DIR}/example -B ${WORK_DIR}/build -G ${GENERATOR}
  -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_BUILD_TYPE=Release)
step(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
step(${WORK_DIR}/build/paramwire_example)
message("${step_output}")

# A build-tree path in the installed CMake files would work on this machine only.
file(GLOB_RECURSE installed ${prefix}/*.cmake)
foreach(file IN LISTS installed)
  file(READ ${file} text)
  if(text MATCHES "${BUILD_DIR}")
    message(FATAL_ERROR "${file} names the build folder ${BUILD_DIR}")
  endif()
endforeach()

# What is installed includes what is installed, and nothing of rdma-core.
file(GLOB_RECURSE headers RELATIVE ${prefix}/include ${prefix}/include/*.hpp)
list(LENGTH headers count)
if(count LESS 20)
  message(FATAL_ERROR "${count} headers were installed, expected those of every layer")
endif()
foreach(header IN LISTS headers)
  file(STRINGS ${prefix}/include/${header} lines REGEX "^#include")
  foreach(line IN LISTS lines)
    if(line MATCHES "<(infiniband|rdma)/")
      message(FATAL_ERROR "${header} needs rdma-core: ${line}")
    endif()
    if(line MATCHES "\"(paramwire/[^\"]+)\"" AND NOT CMAKE_MATCH_1 IN_LIST headers)
      message(FATAL_ERROR "${header} includes ${CMAKE_MATCH_1}, which is not installed")
    endif()
  endforeach()
endforeach()
