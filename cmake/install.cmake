# `cmake --install`: headers, one static library made of every layer, and find_package(paramwire).
#
# Components: "devel" (all of this) and "python" (the extension module, bindings/CMakeLists.txt).
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# One archive rather than one a layer: the layers are how the tree is held in order, not something a user should have to list.
get_property(paramwire_layers GLOBAL PROPERTY PARAMWIRE_LAYERS)
set(paramwire_objects "")
set(paramwire_links "")
foreach(layer IN LISTS paramwire_layers)
  list(APPEND paramwire_objects $<TARGET_OBJECTS:paramwire_${layer}>)
  get_target_property(layer_links paramwire_${layer} INTERFACE_LINK_LIBRARIES)
  foreach(link IN LISTS layer_links)
    string(REGEX REPLACE "^\\$<LINK_ONLY:(.*)>$" "\\1" link "${link}")
    string(REGEX REPLACE "^paramwire_" "" link_layer "${link}")
    if(link AND NOT link_layer IN_LIST paramwire_layers AND NOT link MATCHES "BUILD_INTERFACE")
      list(APPEND paramwire_links ${link})
    endif()
  endforeach()
endforeach()
list(REMOVE_DUPLICATES paramwire_links)

add_library(paramwire STATIC ${paramwire_objects})
add_library(paramwire::paramwire ALIAS paramwire)
set_target_properties(paramwire PROPERTIES LINKER_LANGUAGE CXX)
target_compile_features(paramwire PUBLIC cxx_std_20)
target_include_directories(paramwire INTERFACE
  $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/cpp>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(paramwire INTERFACE ${paramwire_links})

set(paramwire_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/paramwire)
# Without the headers that include <infiniband/verbs.h> or <cuda.h>: who links the library needs no rdma-core and no CUDA (tests/install
# checks).
install(DIRECTORY cpp/paramwire DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT devel FILES_MATCHING PATTERN "*.hpp"
  PATTERN "verbs_lib.hpp" EXCLUDE PATTERN "cuda" EXCLUDE REGEX "/cuda_[a-z]+\\.hpp$" EXCLUDE)
install(TARGETS paramwire EXPORT paramwire ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT devel)
install(EXPORT paramwire NAMESPACE paramwire:: FILE paramwireTargets.cmake DESTINATION ${paramwire_cmake_dir} COMPONENT devel)
configure_package_config_file(cmake/paramwireConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/paramwireConfig.cmake
  INSTALL_DESTINATION ${paramwire_cmake_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/paramwireConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/paramwireConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/paramwireConfigVersion.cmake
  cmake/dependencies.cmake
  DESTINATION ${paramwire_cmake_dir} COMPONENT devel)
