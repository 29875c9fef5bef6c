// paramwire._core: the table of contents of the bindings. Each bind_*.cpp registers one layer; python/paramwire/_core.pyi types
// and documents it.
#include "module.hpp"

#include "convert.hpp"

#include <openssl/crypto.h>
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_core, module) {
  using namespace paramwire::bindings;
  // OpenSSL, which is a part of this module, would clean itself up at exit, under the feet of a server's or client's thread that a
  // program left running. The process ends anyway.
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  module.attr("__version__") = PARAMWIRE_VERSION;
  bind_errors(module);
  bind_checksums(module);
  bind_delta(module);
  bind_trace(module);
  bind_codec(module);
  bind_available(module);
  bind_key(module);
  bind_publish(module);
  bind_server(module);
  bind_view(module);
  bind_dlpack(module);
  bind_client(module);
  bind_snapshot(module);
  bind_mirror(module);
  bind_checkpoint(module);
  bind_graph(module);
  bind_engine(module);
  bind_timing(module);
  bind_codec_timing(module);
}
