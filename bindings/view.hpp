// View: a block where it lies, as a buffer (PEP 3118), an array and a DLPack producer.
#pragma once

#include "arrays.hpp"

#include "paramwire/client/client.hpp"

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace paramwire::bindings {

// The bytes of a view, shared by it and by what it exported. Exports are counted: the bytes stay until the last one is gone.
// threads: any, with or without the GIL: a DLPack consumer may end its export anywhere.
class ViewBytes {
 public:
  explicit ViewBytes(BlockView view) : view_(std::move(view)), bytes_(view_.bytes()), verified_now_(view_.verified_now()) {}

  // One more export; false when the view was released, or is about to be.
  bool hold();
  // One export less. returns: what is to be destroyed now that nobody needs it.
  [[nodiscard]] std::optional<BlockView> drop();
  // The owner is done: the last export takes the bytes with it. returns: as drop().
  [[nodiscard]] std::optional<BlockView> leave();
  // returns: as drop(); `exports` says how many are in the way, in which case nothing is done.
  [[nodiscard]] std::optional<BlockView> release(std::size_t& exports);
  bool released() const;
  bool verified_now() const noexcept { return verified_now_; }
  // Good while held.
  const std::byte* data() const noexcept;
  std::size_t size() const noexcept { return bytes_.size(); }

 private:
  std::optional<BlockView> end();  // lock held

  mutable std::mutex mutex_;
  BlockView view_;
  const std::span<const std::byte> bytes_;
  const bool verified_now_;
  std::size_t exports_ = 0;
  bool ending_ = false;
  bool released_ = false;
};

class PyView {
 public:
  PyView(BlockView view, Snapshot::Layout layout);
  ~PyView();

  // errors: BufferError while arrays, memoryviews or DLPack tensors of it live.
  void release();
  // As release(), but then the last export ends it.
  void leave();
  py::object array(py::handle self) const;
  py::capsule dlpack(py::handle stream, py::handle max_version, py::handle dl_device, py::handle copy) const;
  bool verified_now() const noexcept { return bytes_->verified_now(); }
  const Snapshot::Layout& layout() const noexcept { return layout_; }
  bool released() const { return bytes_->released(); }

  // The buffer protocol (PEP 3118).
  int get_buffer(PyObject* self, Py_buffer* buffer, int flags);
  void drop_buffer();

 private:
  void fill_buffer_shape();

  std::shared_ptr<ViewBytes> bytes_;  // shared with the consumers of DLPack exports, which may outlive this object
  Snapshot::Layout layout_;
  std::vector<Py_ssize_t> shape_, strides_;
  const char* format_ = "B";
  Py_ssize_t item_bytes_ = 1;
};

}  // namespace paramwire::bindings
