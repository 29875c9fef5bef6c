# Compile through ccache where it is installed. The base directory makes a second clone of the same commit hit the cache of the
# first: paths below it are hashed relative to the build folder. It is set here, not by a wrapper script, so that presets, the
# wheel build and IDEs all share one cache.
find_program(PARAMWIRE_CCACHE ccache)
mark_as_advanced(PARAMWIRE_CCACHE)
if(PARAMWIRE_CCACHE)
  set(paramwire_launcher
    ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_CURRENT_SOURCE_DIR} CCACHE_NOHASHDIR=true ${PARAMWIRE_CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${paramwire_launcher})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${paramwire_launcher})
endif()
