# The libraries that paramwire links. Read twice: by the build, and, installed beside paramwireConfig.cmake, by whoever links
# libparamwire.a; so nothing here may lean on the build tree. What cannot be found is named, all of it at once, in
# PARAMWIRE_MISSING; the reader decides how to fail.
set(PARAMWIRE_MISSING "")

# Define the imported target `paramwire_<name>` from one header and one library.
#   paramwire_find_library(<name> HEADER <file> LIBRARY <base name> PACKAGE <Debian package>)
# PARAMWIRE_STATIC_DEPENDENCIES prefers lib<base name>.a; where a distribution ships none, the shared one is taken.
macro(paramwire_find_library name)
  cmake_parse_arguments(FIND "" "HEADER;LIBRARY;PACKAGE" "" ${ARGN})
  string(TOUPPER ${name} FIND_UPPER)
  find_path(${FIND_UPPER}_INCLUDE_DIR ${FIND_HEADER})
  if(PARAMWIRE_STATIC_DEPENDENCIES)
    find_library(${FIND_UPPER}_LIBRARY NAMES lib${FIND_LIBRARY}.a ${FIND_LIBRARY})
  else()
    find_library(${FIND_UPPER}_LIBRARY NAMES ${FIND_LIBRARY})
  endif()
  mark_as_advanced(${FIND_UPPER}_INCLUDE_DIR ${FIND_UPPER}_LIBRARY)
  if(NOT ${FIND_UPPER}_INCLUDE_DIR OR NOT ${FIND_UPPER}_LIBRARY)
    list(APPEND PARAMWIRE_MISSING "${FIND_HEADER} or lib${FIND_LIBRARY} (Debian: ${FIND_PACKAGE})")
  elseif(NOT TARGET paramwire_${name})
    add_library(paramwire_${name} INTERFACE IMPORTED)
    target_include_directories(paramwire_${name} SYSTEM INTERFACE ${${FIND_UPPER}_INCLUDE_DIR})
    target_link_libraries(paramwire_${name} INTERFACE ${${FIND_UPPER}_LIBRARY})
  endif()
endmacro()

find_package(Threads QUIET)
if(NOT Threads_FOUND)
  list(APPEND PARAMWIRE_MISSING "POSIX threads (Debian: libc6-dev)")
endif()

set(OPENSSL_USE_STATIC_LIBS ${PARAMWIRE_STATIC_DEPENDENCIES})
find_package(OpenSSL 3.0 QUIET COMPONENTS Crypto SSL)
if(NOT TARGET OpenSSL::Crypto OR NOT TARGET OpenSSL::SSL)
  list(APPEND PARAMWIRE_MISSING "OpenSSL 3.0 (Debian: libssl-dev)")
endif()

paramwire_find_library(isal HEADER isa-l/crc64.h LIBRARY isal PACKAGE libisal-dev)
paramwire_find_library(lz4 HEADER lz4.h LIBRARY lz4 PACKAGE liblz4-dev)
# Of Highway the library only tells which instructions the machine has. Debian has it as a shared one alone.
paramwire_find_library(hwy HEADER hwy/highway.h LIBRARY hwy PACKAGE libhwy-dev)

# BLIS for matrix products: the static, serial build (compute/blas.hpp says why this one), in a folder of its own.
find_path(BLIS_INCLUDE_DIR blis.h PATH_SUFFIXES blis-serial)
find_library(BLIS_LIBRARY NAMES libblis.a PATH_SUFFIXES blis-serial)
mark_as_advanced(BLIS_INCLUDE_DIR BLIS_LIBRARY)
if(NOT BLIS_INCLUDE_DIR OR NOT BLIS_LIBRARY)
  list(APPEND PARAMWIRE_MISSING "blis.h or libblis.a, built with --enable-cblas --disable-threading (Debian: libblis-serial-dev)")
elseif(NOT TARGET paramwire_blis)
  add_library(paramwire_blis INTERFACE IMPORTED)
  target_include_directories(paramwire_blis SYSTEM INTERFACE ${BLIS_INCLUDE_DIR})
  target_link_libraries(paramwire_blis INTERFACE ${BLIS_LIBRARY} m)
endif()
