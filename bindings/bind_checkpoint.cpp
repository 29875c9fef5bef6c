#include "arrays.hpp"
#include "calls.hpp"
#include "client.hpp"
#include "module.hpp"
#include "publish.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/client/checkpoint_client.hpp"
#include "paramwire/store/checkpoint.hpp"
#include "paramwire/store/checkpoint_memory.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

namespace paramwire::bindings {

namespace {

using Progress = std::shared_ptr<CheckpointProgress>;

Progress progress_from(py::handle given) { return given.is_none() ? std::make_shared<CheckpointProgress>() : value_from<Progress>(given, "progress", "a CheckpointProgress or None"); }

std::uint64_t memory_from(py::handle given) {
  return given.is_none() ? kCheckpointMemoryDefault : value_from<std::uint64_t>(given, "memory_limit", "a number of bytes, 0 to 2**64 - 1, or None");
}

// Runs `work` as interruptible() does, but what was interrupted stops soon instead of going on.
template <typename Work>
auto stoppable(Progress progress, Work work, py::object keep) {
  try {
    return interruptible(std::move(work), std::move(keep));
  } catch (py::error_already_set&) {
    progress->stop_at = 0;
    throw;
  }
}

CodecId codec_from(const std::string& word) { return take(codec_of(word)); }

// ---------------------------------------------------------------- saving

CheckpointSaveOptions save_options(const Progress& progress, std::uint32_t workers, std::uint32_t full_every, std::uint32_t keep, const std::string& codec, bool delta, bool verify,
                                   py::handle memory_limit, std::uint64_t created_us) {
  CheckpointSaveOptions options;
  options.workers = workers;
  options.full_every = full_every;
  options.keep = keep;
  options.codec = codec_from(codec);
  options.delta = delta;
  options.verify = verify;
  options.memory_limit = memory_from(memory_limit);
  options.created_us = created_us;
  options.progress = progress;
  return options;
}

py::dict saved_dict(const CheckpointSaved& saved) {
  py::dict out;
  out["version"] = version_object(saved.version);
  out["existed"] = saved.existed;
  out["full"] = saved.full;
  const std::pair<const char*, std::uint64_t> counts[] = {
      {"blocks", saved.blocks},
      {"blocks_full", saved.blocks_full},
      {"blocks_delta", saved.blocks_delta},
      {"blocks_unchanged", saved.blocks_unchanged},
      {"blocks_resumed", saved.blocks_resumed},
      {"raw_bytes", saved.raw_bytes},
      {"written_bytes", saved.written_bytes},
      {"leftovers_removed", saved.leftovers_removed},
  };
  for (const auto& [name, count] : counts) out[name] = count;
  py::list removed;
  for (const Version version : saved.removed) removed.append(version_object(version));
  out["removed"] = py::tuple(removed);
  out["notes"] = py::tuple(py::cast(saved.notes));
  return out;
}

py::dict save_snapshot(const std::filesystem::path& directory, PySnapshot& snapshot, std::uint32_t workers, std::uint32_t full_every, std::uint32_t keep, const std::string& codec,
                       bool delta, bool verify, py::handle memory_limit, std::uint64_t created_us, py::handle timeout, py::handle progress) {
  const Progress shared = progress_from(progress);
  const auto options = save_options(shared, workers, full_every, keep, codec, delta, verify, memory_limit, created_us);
  const CallOptions call{micros(timeout, "timeout")};
  const auto saved = stoppable(
      shared,
      [directory = directory.string(), core = snapshot.core(), options, call] {
        SnapshotSource source(core, call);
        return std::make_shared<Result<CheckpointSaved>>(save_checkpoint(directory, source, options, posix_files()));
      },
      snapshot.client());
  return saved_dict(take(std::move(*saved)));
}

// Arrays as blocks of a source. Keeps the arrays; cuts them in row ranges of about `block_bytes`, as Publish.put_rows does; names that share memory are aliases.
struct Arrays {
  py::list keep;
  std::vector<MemoryBlock> blocks;
  std::vector<std::pair<std::string, std::string>> aliases;

  void add(const std::string& name, Source source, std::uint64_t block_bytes) {
    keep.append(source.array);
    const std::uint64_t rows = source.shape.rank() == 0 ? 1 : source.shape[0];
    const std::uint64_t row_bits = rows == 0 ? 0 : source.shape.elements() / rows * dtype_bits(source.dtype);
    if (source.bytes.size() <= block_bytes || rows < 2) {
      blocks.push_back({name, source.dtype, source.shape, source.part, source.bytes});
      return;
    }
    std::uint64_t step = std::max<std::uint64_t>(1, block_bytes * 8 / row_bits);
    if (row_bits % 8 != 0) step = std::max<std::uint64_t>(2, step / 2 * 2);  // 4-bit rows of odd length: two fill whole bytes
    for (std::uint64_t begin = 0; begin < rows; begin += step) {
      const std::uint64_t end = std::min(rows, begin + step);
      const auto bytes = source.bytes.subspan(static_cast<std::size_t>(begin * row_bits / 8), static_cast<std::size_t>(((end - begin) * row_bits + 7) / 8));
      blocks.push_back({name, source.dtype, source.shape, Shard::rows(begin, end), bytes});
    }
  }
};

Arrays arrays_from(py::handle mapping, py::handle dtypes, std::uint64_t block_bytes) {
  if (block_bytes == 0) raise_invalid("block_bytes is 0");
  using Key = std::tuple<const void*, std::string, std::vector<py::ssize_t>, std::vector<py::ssize_t>>;  // as Publish.put_all
  std::map<Key, std::string> seen;
  std::atomic<std::uint64_t> copies{0};
  Arrays out;
  py::list kept;
  const py::object items = items_of(mapping, "a source that is no client and no snapshot");
  for (const py::handle item : items_of(dtypes, "dtypes")) {
    const auto pair = py::reinterpret_borrow<py::tuple>(item);
    if (mapping.contains(pair[0])) continue;
    raise_invalid(cat("dtypes has a label for \"", name_from(pair[0]), "\", which is none of the arrays: look for a misspelt name"));
  }
  for (const py::handle item : items) {
    const auto pair = py::reinterpret_borrow<py::tuple>(item);
    const std::string name = name_from(pair[0]);
    Given given = given_from(cat("tensor \"", name, '"'), pair[1]);
    const py::array& array = given.array;
    const py::object label = dtypes.attr("get")(pair[0]);
    if (array.nbytes() > 0) {
      kept.append(array);
      const std::string type = cat(given.label ? std::string(dtype_name(*given.label)) : std::string(py::str(py::object(array.dtype()))), std::string(py::str(label)));
      Key key{array.data(), type, {array.shape(), array.shape() + array.ndim()}, {array.strides(), array.strides() + array.ndim()}};
      const auto [at, fresh] = seen.emplace(std::move(key), name);
      if (!fresh) {
        out.aliases.emplace_back(name, at->second);
        continue;
      }
    }
    out.add(name, source_from(name, std::move(given), label, py::none(), py::none(), py::none(), copies), block_bytes);
  }
  return out;
}

py::dict save_arrays(const std::filesystem::path& directory, py::handle arrays, py::handle version, py::handle dtypes, std::uint64_t block_bytes, std::uint32_t workers,
                     std::uint32_t full_every, std::uint32_t keep, const std::string& codec, bool delta, bool verify, py::handle memory_limit, std::uint64_t created_us,
                     py::handle progress) {
  const Progress shared = progress_from(progress);
  const auto options = save_options(shared, workers, full_every, keep, codec, delta, verify, memory_limit, created_us);
  const Version as = version_from(version);
  auto given = std::make_shared<Arrays>(arrays_from(arrays, dtypes, block_bytes));
  const py::object kept = given->keep;
  const auto saved = stoppable(
      shared,
      [directory = directory.string(), blocks = std::move(given->blocks), aliases = std::move(given->aliases), as, options]() mutable {
        const auto save = [&]() -> Result<CheckpointSaved> {
          PARAMWIRE_TRY(source, MemorySource::make(as, std::move(blocks), aliases, options.workers));
          return save_checkpoint(directory, *source, options, posix_files());
        };
        return std::make_shared<Result<CheckpointSaved>>(save());
      },
      kept);
  return saved_dict(take(std::move(*saved)));
}

// ---------------------------------------------------------------- reading

class PyCheckpoint {
 public:
  PyCheckpoint(const std::filesystem::path& directory, py::handle version) {
    std::optional<Version> want;
    if (!version.is_none()) want = version_from(version);
    checkpoint_ = take(without_gil([&] { return Checkpoint::open(directory.string(), want, posix_files()); }));
    for (CheckpointTensor& tensor : checkpoint_tensors(checkpoint_->manifest())) tensors_.emplace(tensor.name, std::move(tensor));
  }
  ~PyCheckpoint() {
    without_gil([this] { checkpoint_.reset(); });
  }

  const std::shared_ptr<Checkpoint>& core() const {
    if (!checkpoint_) raise_invalid("the checkpoint is closed");
    return checkpoint_;
  }
  void close() {
    without_gil([this] { checkpoint_.reset(); });
  }
  py::object version() const { return version_object(core()->manifest().version()); }
  std::uint64_t created_us() const { return core()->facts().created_us; }
  std::uint32_t chain() const { return core()->facts().chain; }
  std::vector<std::string> notes() const { return core()->notes(); }

  py::list tensors() const {
    py::list out;
    const py::object type = python_type("TensorInfo");
    for (const auto& [name, tensor] : tensors_) {
      const py::object alias = tensor.alias_of.empty() ? py::object(py::none()) : py::object(text(tensor.alias_of));
      // The manifest says how long records are, not how they are coded: that is in each of them.
      std::uint64_t stored = 0;
      for (const ManifestEntry& block : tensor.blocks) {
        for (const CheckpointLink& link : core()->links(block)) stored += link.size;
      }
      out.append(type(text(name), text(dtype_name(tensor.dtype)), shape_tuple(tensor.shape), tensor.bytes, tensor.blocks.size(), version_object(tensor.version), alias,
                      text(codec_name(CodecId::kRaw)), stored));
    }
    return out;
  }
  // (id, first row, end row, bytes) of each block; a tensor without rows has one from 0 to 1.
  py::list blocks(const std::string& name) const {
    py::list out;
    for (const ManifestEntry& block : tensor(name).blocks) {
      const auto rows = block.shard.kind == ShardKind::kWhole ? std::pair<std::uint64_t, std::uint64_t>(0, block.shape.rank() == 0 ? 1 : block.shape[0]) : take(shard_rows(block.shape, block.shard));
      out.append(py::make_tuple(block.id.value, rows.first, rows.second, block.raw_size));
    }
    return out;
  }
  py::object read(const std::string& name, py::handle out, std::uint32_t workers, py::handle memory_limit) {
    const CheckpointTensor& tensor = this->tensor(name);
    if (!tensor.covered) raise(Error(Code::kNotFound, cat("tensor \"", name, "\" is only in parts in this checkpoint: read its blocks (read_block)")));
    py::object result = py::reinterpret_borrow<py::object>(out);
    std::unique_ptr<Target> target;
    std::span<std::byte> bytes;
    if (out.is_none()) {
      py::array made = new_array(tensor.dtype, tensor.shape);
      bytes = bytes_of(made);
      result = made;
    } else {
      target = std::make_unique<Target>(out);
      if (target->scattered()) target->stage(tensor.dtype, tensor.shape);
      bytes = target->bytes();
      if (bytes.size() != tensor.bytes) raise_invalid(cat("tensor \"", name, "\" has ", tensor.bytes, " bytes, out ", bytes.size()));
    }
    const std::vector<ManifestEntry>& blocks = tensor.blocks;
    fill(blocks, tensor.blocks.empty() ? std::string() : std::string(blocks.front().tensor), bytes, workers, memory_from(memory_limit), result);
    if (target) target->finish();
    return result;
  }
  py::object read_block(std::uint64_t id) {
    const auto hit = core()->manifest().find(BlockId{id});
    if (!hit || hit->entry.kind != EntryKind::kBlock) raise(Error(Code::kNotFound, cat("no block ", BlockId{id}, " in this checkpoint")));
    py::array_t<std::uint8_t> out(static_cast<py::ssize_t>(hit->entry.raw_size));
    const std::span<std::byte> bytes(reinterpret_cast<std::byte*>(out.mutable_data()), static_cast<std::size_t>(hit->entry.raw_size));
    check(interruptible(
        [checkpoint = core(), entry = hit->entry, bytes] {
          CheckpointScratch scratch;
          return checkpoint->read(entry, bytes, scratch);
        },
        out));
    return out;
  }
  py::dict read_all(std::uint32_t workers, py::handle memory_limit, py::handle progress) {
    const Progress shared = progress_from(progress);
    auto sink = std::make_shared<MemorySink>();
    py::dict arrays;
    for (const auto& [name, tensor] : tensors_) {
      if (!tensor.alias_of.empty()) continue;
      if (!tensor.covered) raise(Error(Code::kNotFound, cat("tensor \"", name, "\" is only in parts in this checkpoint: read its blocks (read_block)")));
      py::array made = new_array(tensor.dtype, tensor.shape);
      sink->add(name, bytes_of(made));
      arrays[text(name)] = made;
    }
    CheckpointRestoreOptions options;
    options.workers = workers;
    options.memory_limit = memory_from(memory_limit);
    options.progress = shared;
    check(stoppable(shared, [checkpoint = core(), sink, options] { return restore_checkpoint(*checkpoint, *sink, options); }, arrays));
    for (const auto& [name, tensor] : tensors_) {
      if (tensor.alias_of.empty()) continue;
      const py::object target = arrays.attr("get")(text(tensor.alias_of));
      if (target.is_none()) raise(Error(Code::kCorrupt, cat("alias \"", name, "\" of \"", tensor.alias_of, "\", which is not in this checkpoint")));
      arrays[text(name)] = target;
    }
    return arrays;
  }

 private:
  const CheckpointTensor& tensor(const std::string& name) const {
    core();
    const auto at = tensors_.find(name);
    if (at == tensors_.end()) raise(Error(Code::kNotFound, cat("no tensor \"", name, "\" in this checkpoint, which has ", tensors_.size())));
    return at->second;
  }
  void fill(const std::vector<ManifestEntry>& blocks, const std::string& stored, std::span<std::byte> bytes, std::uint32_t workers, std::uint64_t memory_limit, const py::object& keep) {
    if (blocks.empty()) return;
    auto sink = std::make_shared<MemorySink>();
    sink->add(stored, bytes);
    const Progress progress = std::make_shared<CheckpointProgress>();
    CheckpointRestoreOptions options;
    options.workers = workers;
    options.memory_limit = memory_limit;
    options.progress = progress;
    check(stoppable(progress, [checkpoint = core(), sink, blocks, options] { return restore_blocks(*checkpoint, blocks, *sink, options); }, keep));
  }

  std::shared_ptr<Checkpoint> checkpoint_;
  std::map<std::string, CheckpointTensor> tensors_;
};

// ---------------------------------------------------------------- what is there

py::list list_all(const std::filesystem::path& directory) {
  const auto found = take(without_gil([&] { return list_checkpoints(directory.string(), posix_files()); }));
  py::list out;
  for (const CheckpointSummary& summary : found) {
    py::dict item;
    item["file"] = summary.file;
    item["version"] = version_object(summary.version);
    item["whole"] = summary.whole;
    item["problem"] = summary.problem;
    item["created_us"] = summary.created_us;
    item["full"] = summary.full;
    item["chain"] = summary.chain;
    item["blocks"] = summary.blocks;
    item["raw_bytes"] = summary.raw_bytes;
    item["stored_bytes"] = summary.stored_bytes;
    item["written_bytes"] = summary.written_bytes;
    out.append(item);
  }
  return out;
}

py::dict verify_all(const std::filesystem::path& directory, py::handle version, bool decode, std::uint32_t workers, py::handle memory_limit, py::handle progress) {
  CheckpointVerifyOptions options;
  if (!version.is_none()) options.version = version_from(version);
  options.decode = decode;
  options.workers = workers;
  options.memory_limit = memory_from(memory_limit);
  options.progress = progress_from(progress);
  const auto found = stoppable(
      options.progress,
      [directory = directory.string(), options] { return std::make_shared<Result<CheckpointVerified>>(verify_checkpoints(directory, options, posix_files())); }, py::none());
  const CheckpointVerified verified = take(std::move(*found));
  py::dict out;
  out["checkpoints"] = verified.checkpoints;
  out["files"] = verified.files;
  out["records"] = verified.records;
  out["bytes"] = verified.bytes;
  py::list problems;
  for (const CheckpointProblem& problem : verified.problems) {
    py::list versions;
    for (const Version needs : problem.versions) versions.append(version_object(needs));
    py::dict item;
    item["file"] = problem.file;
    item["offset"] = problem.offset;
    item["block"] = text(problem.block);
    item["extent"] = problem.extent ? py::object(py::int_(*problem.extent)) : py::object(py::none());
    item["text"] = text(problem.text);
    item["versions"] = py::tuple(versions);
    problems.append(item);
  }
  out["problems"] = problems;
  return out;
}

}  // namespace

void PyPublish::put_checkpoint(py::handle checkpoint, py::handle replaces, std::uint32_t workers, py::handle memory_limit, py::handle progress) {
  CheckpointRestoreOptions options;
  options.workers = workers;
  options.memory_limit = memory_from(memory_limit);
  options.progress = progress_from(progress);
  const auto core = value_from<PyCheckpoint&>(checkpoint, "checkpoint", "a Checkpoint").core();
  const std::shared_ptr<Snapshot> current = replaces.is_none() ? nullptr : value_from<PySnapshot&>(replaces, "replaces", "a Snapshot or None").core();
  check(stoppable(
      options.progress,
      [shared = shared_, core, current, options, call = options_] {
        const std::lock_guard lock(shared->mutex);
        return publish_checkpoint(*core, *shared->publisher, current ? &current->manifest() : nullptr, options, call);
      },
      owner_));
}

void bind_checkpoint(py::module_& module) {
  const auto none = py::none();
  py::class_<CheckpointProgress, Progress>(module, "CheckpointProgress", py::is_final())
      .def(py::init<>())
      .def_property_readonly("blocks", [](const CheckpointProgress& self) { return self.blocks.load(); })
      .def_property_readonly("blocks_done", [](const CheckpointProgress& self) { return self.blocks_done.load(); })
      .def_property_readonly("bytes", [](const CheckpointProgress& self) { return self.bytes.load(); })
      .def_property_readonly("bytes_done", [](const CheckpointProgress& self) { return self.bytes_done.load(); })
      .def("stop", [](CheckpointProgress& self, double after) { self.stop_at = steady_clock().now() + micros_required(after, "after"); }, py::arg("after") = 0.0);
  py::class_<PyCheckpoint>(module, "Checkpoint", py::is_final())
      .def(py::init<const std::filesystem::path&, py::handle>(), py::arg("directory"), py::kw_only(), py::arg("version") = none)
      .def_property_readonly("version", &PyCheckpoint::version)
      .def_property_readonly("created_us", &PyCheckpoint::created_us)
      .def_property_readonly("chain", &PyCheckpoint::chain)
      .def_property_readonly("notes", &PyCheckpoint::notes)
      .def("tensors", &PyCheckpoint::tensors)
      .def("blocks", &PyCheckpoint::blocks, py::arg("name"))
      .def("read", &PyCheckpoint::read, py::arg("name"), py::kw_only(), py::arg("out") = none, py::arg("workers") = 2U, py::arg("memory_limit") = none)
      .def("read_block", &PyCheckpoint::read_block, py::arg("id"))
      .def("read_all", &PyCheckpoint::read_all, py::kw_only(), py::arg("workers") = 2U, py::arg("memory_limit") = none, py::arg("progress") = none)
      .def("close", &PyCheckpoint::close)
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyCheckpoint& self, const py::object&, const py::object&, const py::object&) { self.close(); }, py::arg("type"), py::arg("value"), py::arg("traceback"));
  module.def("save_snapshot", &save_snapshot, py::arg("directory"), py::arg("snapshot"), py::kw_only(), py::arg("workers"), py::arg("full_every"), py::arg("keep"), py::arg("codec"),
             py::arg("delta"), py::arg("verify"), py::arg("memory_limit"), py::arg("created_us"), py::arg("timeout"), py::arg("progress"));
  module.def("save_arrays", &save_arrays, py::arg("directory"), py::arg("arrays"), py::kw_only(), py::arg("version"), py::arg("dtypes"), py::arg("block_bytes"), py::arg("workers"),
             py::arg("full_every"), py::arg("keep"), py::arg("codec"), py::arg("delta"), py::arg("verify"), py::arg("memory_limit"), py::arg("created_us"), py::arg("progress"));
  module.def("list_checkpoints", &list_all, py::arg("directory"));
  module.def("verify_checkpoints", &verify_all, py::arg("directory"), py::kw_only(), py::arg("version"), py::arg("decode"), py::arg("workers"), py::arg("memory_limit"),
             py::arg("progress"));
}

}  // namespace paramwire::bindings
