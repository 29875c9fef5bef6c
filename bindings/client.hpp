// Client, Snapshot, Ticket and View as Python sees them.
#pragma once

#include "arrays.hpp"
#include "device_array.hpp"
#include "view.hpp"
#include "publish.hpp"

#include "paramwire/client/client.hpp"

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire::bindings {

// ---------------------------------------------------------------- client

// What a client's calls share.
struct ClientCore {
  std::shared_ptr<Client> client;
  std::atomic<bool> views_ready{false};
  Counters counters;
  std::mutex closing;
};

class PyClient;

// Memory of the caller that devices may write, and what keeps it.
class PyRegistration {
 public:
  PyRegistration(std::unique_ptr<Target> target, BufferRegistration registration) : size_(target->bytes().size()), target_(std::move(target)), registration_(std::move(registration)) {}
  ~PyRegistration() { release(); }
  std::size_t size() const noexcept { return size_; }
  void release();

 private:
  std::size_t size_;
  std::unique_ptr<Target> target_;
  BufferRegistration registration_;
};

class Batch;

class PyTicket {
 public:
  PyTicket(Ticket ticket, std::unique_ptr<Batch> batch, std::shared_ptr<ClientCore> core);
  ~PyTicket();
  bool done() const { return ticket_.done(); }
  double seconds() const { return ticket_.seconds(); }
  py::object wait(py::handle timeout);

 private:
  Ticket ticket_;
  std::unique_ptr<Batch> batch_;  // keeps names and targets
  std::shared_ptr<ClientCore> core_;
};

// Requests with their targets, ready for the core; keeps everything that they point to.
class Batch {
 public:
  // `stream`, `timeout`: of the call, for targets on devices.
  Batch(py::handle stream, std::optional<Micros> timeout) : stream_(py::reinterpret_borrow<py::object>(stream)), device_call_(stream, timeout) {}
  // One tensor or part. `out`: None makes an array.
  void add(const Snapshot& snapshot, std::string_view name, const Shard& part, py::handle out);
  void add(const Snapshot& snapshot, BlockId block, py::handle out);
  // Several whole tensors, by name or with their targets; `allow_missing` are patterns of names that need not be there.
  // errors: one, that lists every tensor that is missing or does not fit; nothing is fetched then.
  void add_many(const Snapshot& snapshot, py::handle names, py::handle allow_missing);

  std::uint64_t bytes() const noexcept { return bytes_; }
  py::object result() const { return many_ ? py::object(many_) : one_; }
  struct OnDevice {
    std::shared_ptr<DeviceWork> work;
    std::vector<DeviceFetch> fetches;
  };
  struct Requests {
    std::vector<std::string> names;
    std::vector<FetchRequest> requests;
    std::deque<std::string> device_names;  // that fetches point to
    std::vector<OnDevice> devices;
    // Those into host memory, then those into each device's.
    Status fetch(Snapshot& snapshot, const CallOptions& options);
  };
  // Of a call that outlives this frame.  errors: InvalidError for a stream that no target has a use for
  std::shared_ptr<Requests> requests();
  bool on_device() const noexcept { return !requests_->devices.empty(); }
  py::object keep() const { return py::object(keep_); }
  // After success: fills the targets that got a copy first, and counts them.
  void finish(Counters& counters);

 private:
  void add_target(const Snapshot::Layout& layout, py::handle out);
  // A target in device memory.
  DeviceGiven add_device(std::string_view name, const Shard& part, const Snapshot::Layout& layout, py::handle out);

  const py::object stream_;
  DeviceCall device_call_;
  std::shared_ptr<Requests> requests_ = std::make_shared<Requests>();
  std::uint64_t bytes_ = 0;
  py::list keep_;
  std::vector<Target*> staged_;  // kept by keep_
  Target* last_ = nullptr;       // the target just added, null for an array of ours
  py::object one_;
  py::dict many_{py::reinterpret_steal<py::dict>(nullptr)};
};

class PySnapshot {
 public:
  PySnapshot(std::shared_ptr<ClientCore> core, std::shared_ptr<Snapshot> snapshot, py::object client)
      : core_(std::move(core)), snapshot_(std::move(snapshot)), client_(std::move(client)) {}
  ~PySnapshot();

  py::object version() const { return version_object(snapshot_->version()); }
  bool leased() const noexcept { return snapshot_->leased(); }
  py::object client() const { return client_; }
  std::size_t size() const { return entries().size(); }
  py::list names() const;
  bool contains(py::handle name) const;
  py::list tensors() const;
  py::object info(const std::string& name) const;
  py::list blocks(const std::string& name) const;

  py::object fetch(const py::str& name, py::handle rows, py::handle heads, py::handle out, py::handle timeout, py::handle stream);
  py::object fetch_block(std::uint64_t id, py::handle out, py::handle timeout, py::handle stream);
  py::object fetch_many(py::handle names, py::handle timeout, py::handle allow_missing, py::handle stream);
  std::unique_ptr<PyTicket> fetch_async(py::handle names, py::handle rows, py::handle heads, py::handle out, py::handle timeout, py::handle allow_missing);
  std::unique_ptr<PyView> view(const std::string& name, py::handle rows, py::handle heads);
  void close();

  const std::shared_ptr<Snapshot>& core() const noexcept { return snapshot_; }

 private:
  py::object run(Batch& batch, const CallOptions& options);
  const std::vector<TensorEntry>& entries() const;

  std::shared_ptr<ClientCore> core_;
  std::shared_ptr<Snapshot> snapshot_;
  py::object client_;  // the Python object, for .client
  mutable std::optional<std::vector<TensorEntry>> entries_;  // a snapshot never changes
};

class PyClient {
 public:
  PyClient(const std::string& address, const ClientOptions& options);
  ~PyClient();

  std::string transport() const;
  std::string small_transport() const;
  py::list rejected() const;
  py::list fallbacks() const;
  py::object newest() const { return version_object(core_stats().newest); }
  std::string incarnation() const { return core_->client->incarnation().to_string(); }
  std::string address() const { return core_->client->address(); }
  std::unique_ptr<PySnapshot> snapshot(py::handle version, bool lease, double wait, py::handle timeout, py::object self);
  py::object fetch(const py::str& name, py::handle rows, py::handle heads, py::handle out, py::handle timeout, py::handle stream, py::object self);
  py::object fetch_many(py::handle names, py::handle timeout, py::handle allow_missing, py::handle stream, py::object self);
  std::unique_ptr<PyPublish> publish(py::handle base, py::handle codec, py::handle threads, py::handle timeout, py::object self);
  std::unique_ptr<PyRegistration> register_buffer(py::handle buffer) const;
  py::dict stats() const;
  py::dict durations() const;
  py::dict server_stats(py::handle timeout);
  void close();
  const std::shared_ptr<ClientCore>& core() const noexcept { return core_; }

 private:
  ClientStats core_stats() const { return without_gil([this] { return core_->client->stats(); }); }

  std::shared_ptr<ClientCore> core_;
};

}  // namespace paramwire::bindings
