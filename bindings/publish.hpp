// Publish: one class for publishes of the server's own process and for those of a client.
#pragma once

#include "arrays.hpp"
#include "device_array.hpp"

#include "paramwire/client/client.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace paramwire::bindings {

// Counts of one server or client, shared with its publishes.
struct Counters {
  std::atomic<std::uint64_t> copies{0};  // arrays that were copied because of their layout or byte order
};

class PyPublish {
 public:
  // `waits`: its calls may wait for another process. `owner`: the Python object it was made by, kept.
  PyPublish(std::unique_ptr<Publisher> publisher, bool waits, std::optional<Micros> timeout, std::shared_ptr<Counters> counters, py::object owner);
  ~PyPublish();

  void put(const std::string& name, py::handle array, py::handle dtype, py::handle shape, py::handle rows, py::handle heads, py::handle codec,
           py::handle stream);
  void put_rows(const std::string& name, py::handle array, std::uint64_t block_bytes, py::handle dtype, py::handle shape, py::handle codec,
                py::handle stream);
  void put_all(py::handle mapping, py::handle codec, py::handle stream);
  // In bind_checkpoint.cpp.
  void put_checkpoint(py::handle checkpoint, py::handle replaces, std::uint32_t workers, py::handle memory_limit, py::handle progress);
  void alias(const std::string& name, const std::string& target);
  void remove(const std::string& name);
  py::object finish(py::handle timeout);
  void abort();
  py::object version() const { return version_object(version_); }
  std::uint64_t copies() const noexcept { return copies_; }
  // What was put, as it was given and as it is stored.
  Publisher::Totals totals();
  // What __exit__ does.
  void leave(bool failed);

 private:
  struct Item {
    std::string name;
    Source source;
    std::optional<CodecSpec> codec;  // none: the publish's
  };
  struct Shared {  // a call that was interrupted holds it until its end
    std::mutex mutex;  // a publish is one thread's: calls of several take turns
    std::unique_ptr<Publisher> publisher;
  };
  // What `array` hands over, in host memory: out of a device's it is copied.
  Given given(const std::string& name, py::handle array, py::handle stream);
  Source source(const std::string& name, Given given, py::handle dtype, py::handle shape, py::handle rows, py::handle heads);
  void send(std::vector<Item> items);
  template <typename Work>
  auto call(Work work, py::object keep = py::none());

  std::shared_ptr<Shared> shared_;
  const bool waits_;
  const CallOptions options_;
  const std::shared_ptr<Counters> counters_;
  const py::object owner_;
  Version version_;
  std::uint64_t copies_ = 0;
  bool over_ = false;
};

// `base` of publish(): Ellipsis takes any version, None says that nothing is published yet. `codec`: as of put, None is raw.
PublishOptions publish_options(py::handle base, py::handle codec, py::handle threads, py::handle timeout);

}  // namespace paramwire::bindings
