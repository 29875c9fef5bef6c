// Client, Snapshot, Ticket and View as Python sees them.
#pragma once

#include "convert.hpp"
#include "publish.hpp"

#include "paramwire/client/client.hpp"

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace paramwire::bindings {

// ---------------------------------------------------------------- view

// A view of a block as a buffer. Exports are counted: the bytes stay until the last one is gone.
class PyView {
 public:
  PyView(BlockView view, Snapshot::Layout layout) : view_(std::move(view)), layout_(layout) { fill_buffer_shape(); }
  ~PyView();

  // errors: BufferError while arrays or memoryviews of it live.
  void release();
  // As release(), but then the last export ends it.
  void leave();
  py::object array(py::handle self) const;
  bool verified_now() const noexcept { return view_.verified_now(); }
  const Snapshot::Layout& layout() const noexcept { return layout_; }
  bool released() const noexcept { return released_; }

  // The buffer protocol (PEP 3118).
  int get_buffer(PyObject* self, Py_buffer* buffer, int flags);
  void drop_buffer();

 private:
  void fill_buffer_shape();
  void free_bytes();

  BlockView view_;
  Snapshot::Layout layout_;
  std::vector<Py_ssize_t> shape_, strides_;
  const char* format_ = "B";
  Py_ssize_t item_bytes_ = 1;
  std::size_t exports_ = 0;
  bool ending_ = false;
  bool released_ = false;
};

// ---------------------------------------------------------------- client

// What a client's calls share.
struct ClientCore {
  std::shared_ptr<Client> client;
  bool shm = false;                    // reads are loads from mapped memory
  std::atomic<bool> reads_ready{false};  // a read went through: the next one has its link
  std::atomic<bool> views_ready{false};
  Counters counters;
  std::mutex closing;
};

class PyClient;

class PyTicket {
 public:
  PyTicket(Ticket ticket, std::shared_ptr<void> names, py::object keep, py::object result)
      : ticket_(std::move(ticket)), names_(std::move(names)), keep_(std::move(keep)), result_(std::move(result)) {}
  ~PyTicket();
  bool done() const { return ticket_.done(); }
  double seconds() const { return ticket_.seconds(); }
  py::object wait(py::handle timeout);

 private:
  Ticket ticket_;
  std::shared_ptr<void> names_;  // that the requests point to
  py::object keep_;              // the targets
  py::object result_;
};

// Requests with their targets, ready for the core; keeps everything that they point to.
class Batch {
 public:
  // One tensor or part. `out`: None makes an array.
  void add(const Snapshot& snapshot, std::string_view name, const Shard& part, py::handle out);
  void add(const Snapshot& snapshot, BlockId block, py::handle out);
  // Several whole tensors, by name or with their targets; `allow_missing` are patterns of names that need not be there.
  // errors: one, that lists every tensor that is missing or does not fit; nothing is fetched then.
  void add_many(const Snapshot& snapshot, py::handle names, py::handle allow_missing);

  std::uint64_t bytes() const noexcept { return bytes_; }
  py::object result() const { return many_ ? py::object(many_) : one_; }
  struct Requests {
    std::vector<std::string> names;
    std::vector<FetchRequest> requests;
  };
  // Of a call that outlives this frame.
  std::shared_ptr<Requests> requests();
  py::object keep() const { return py::object(keep_); }

 private:
  void add_target(const Snapshot::Layout& layout, py::handle out);

  std::shared_ptr<Requests> requests_ = std::make_shared<Requests>();
  std::uint64_t bytes_ = 0;
  py::list keep_;
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

  py::object fetch(const py::str& name, py::handle rows, py::handle heads, py::handle out, py::handle timeout);
  py::object fetch_block(std::uint64_t id, py::handle out, py::handle timeout);
  py::object fetch_many(py::handle names, py::handle timeout, py::handle allow_missing);
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
  py::list rejected() const;
  py::object newest() const { return version_object(core_->client->stats().newest); }
  std::string incarnation() const { return core_->client->incarnation().to_string(); }
  std::string address() const { return core_->client->address(); }
  std::unique_ptr<PySnapshot> snapshot(py::handle version, bool lease, double wait, py::handle timeout, py::object self);
  py::object fetch(const py::str& name, py::handle rows, py::handle heads, py::handle out, py::handle timeout, py::object self);
  py::object fetch_many(py::handle names, py::handle timeout, py::handle allow_missing, py::object self);
  std::unique_ptr<PyPublish> publish(py::handle base, py::handle timeout, py::object self);
  py::dict stats() const;
  py::dict durations() const;
  py::dict server_stats(py::handle timeout);
  void close();

 private:
  std::shared_ptr<ClientCore> core_;
};

}  // namespace paramwire::bindings
