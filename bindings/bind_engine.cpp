#include "arrays.hpp"
#include "calls.hpp"
#include "client.hpp"
#include "convert.hpp"
#include "graph.hpp"
#include "module.hpp"

#include "paramwire/base/fork_guard.hpp"
#include "paramwire/base/text.hpp"
#include "paramwire/engine/engine.hpp"

#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace paramwire::bindings {

namespace {

EngineOptions::Source source_word(const std::string& word) {
  if (word == "auto") return EngineOptions::Source::kAuto;
  if (word == "view") return EngineOptions::Source::kView;
  if (word == "copy") return EngineOptions::Source::kCopy;
  raise_invalid(cat("source is \"", word, "\": known are auto, view, copy"));
}

// Token ids of any sequence of integers; numpy's of any width come through the same door.
std::vector<Token> tokens_from(py::handle tokens) {
  std::vector<Token> out;
  const auto add = [&](unsigned long long id) {
    if (id > std::numeric_limits<Token>::max()) raise_invalid(cat("token id ", id, " is more than 2**32 - 1"));
    out.push_back(static_cast<Token>(id));
  };
  if (is_ndarray(tokens) && tokens.cast<py::array>().ndim() != 1) raise_invalid(cat("tokens have one axis, not ", describe(tokens.cast<py::array>())));
  for (const py::handle token : tokens) {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(token.ptr()));
    if (!index) throw py::error_already_set();
    const auto id = PyLong_AsUnsignedLongLong(index.ptr());
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      raise_invalid(cat("token id ", std::string(py::repr(token)), " is negative or too large"));
    }
    add(id);
  }
  return out;
}

const PySnapshot& snapshot_of(py::handle object) {
  if (!py::isinstance<PySnapshot>(object)) throw py::type_error(cat("snapshot must be a Snapshot, not ", type_name(object)));
  return object.cast<const PySnapshot&>();
}

class PyEngine {
 public:
  PyEngine(const PySnapshot& snapshot, const PyGraph& graph, EngineOptions options, py::object owner) : owner_(std::move(owner)) {
    shared_ = take(interruptible([core = snapshot.core(), graph = graph.graph, options = std::move(options)]() -> Result<std::shared_ptr<Shared>> {
      PARAMWIRE_TRY(engine, Engine::open(core, graph, options));
      auto shared = std::make_shared<Shared>();
      shared->engine = std::move(engine);
      return shared;
    }));
  }
  ~PyEngine() {
    without_gil([this] { shared_.reset(); });
  }

  py::array step(py::handle tokens) {
    const auto logits = take(interruptible([shared = open(), ids = tokens_from(tokens)]() -> Result<std::vector<float>> {
      const std::lock_guard lock(shared->mutex);
      PARAMWIRE_TRY(row, shared->engine->step(ids));
      return std::vector<float>(row.begin(), row.end());
    }));
    return py::array_t<float>(static_cast<py::ssize_t>(logits.size()), logits.data());
  }
  void rewind(std::uint64_t position) {
    check(interruptible([shared = open(), position] {
      const std::lock_guard lock(shared->mutex);
      return shared->engine->rewind(position);
    }));
  }
  // Not under the mutex: beside steps.
  void prepare(const PySnapshot& next) {
    check(interruptible([shared = open(), core = next.core()] { return shared->engine->prepare(core); }));
  }
  void adopt(py::object next) {
    check(interruptible([shared = open(), core = snapshot_of(next).core()] {
      const std::lock_guard lock(shared->mutex);
      return shared->engine->adopt(core);
    }));
    owner_ = std::move(next);
  }
  std::uint64_t position() const {
    return without_gil([shared = open()] {
      const std::lock_guard lock(shared->mutex);
      return shared->engine->position();
    });
  }
  py::dict stats() const {
    const EngineStats stats = without_gil([shared = open()] { return shared->engine->stats(); });  // any thread
    using py::arg;
    return py::dict(arg("steps") = stats.steps, arg("tokens") = stats.tokens, arg("bytes_fetched") = stats.bytes_fetched,
                    arg("pieces_fetched") = stats.pieces_fetched, arg("stall_seconds") = stats.stall_seconds, arg("compute_seconds") = stats.compute_seconds,
                    arg("fetch_seconds") = stats.fetch_seconds, arg("held_bytes_max") = stats.held_bytes_max, arg("budget_bytes") = stats.budget_bytes,
                    arg("walk_bytes") = stats.walk_bytes, arg("resident_bytes") = stats.resident_bytes, arg("versions_adopted") = stats.versions_adopted,
                    arg("threads") = stats.threads, arg("source") = stats.source);
  }
  std::string description() const { return open()->engine->description(); }
  void close() {
    // The threads end with the engine; a step that was interrupted keeps it until its own end.
    interruptible([shared = std::move(shared_)]() mutable {
      shared.reset();
      return true;
    });
    shared_.reset();
  }

 private:
  struct Shared {
    std::mutex mutex;  // an engine is one thread's: calls of several take turns
    std::unique_ptr<Engine> engine;
    const ForkGuard fork;  // another thread may have held the mutex
  };
  std::shared_ptr<Shared> open() const {
    if (!shared_) raise_invalid("the engine is closed");
    check(shared_->fork.check("engine"));
    return shared_;
  }

  std::shared_ptr<Shared> shared_;
  py::object owner_;  // the snapshot
};

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<PyEngine>(module, "Engine", py::is_final())
      .def(py::init([](py::object snapshot, const PyGraph& graph, std::uint64_t budget, const std::string& backend, std::uint32_t threads,
                       const std::string& source, std::uint64_t context, std::uint64_t step, double fetch_timeout, std::uint32_t versions) {
             EngineOptions options;
             options.budget_bytes = budget;
             options.backend = backend;
             options.backend_options.threads = threads;
             options.session.context_tokens = context;
             options.session.step_tokens = step;
             options.source = source_word(source);
             options.versions = versions;
             options.fetch_timeout = micros_required(fetch_timeout, "fetch_timeout");
             const PySnapshot& held = snapshot_of(snapshot);
             return std::make_unique<PyEngine>(held, graph, std::move(options), std::move(snapshot));
           }),
           py::arg("snapshot"), py::arg("graph"), py::kw_only(), py::arg("budget") = 0, py::arg("backend") = "cpu", py::arg("threads") = 0,
           py::arg("source") = "auto", py::arg("context") = 2048, py::arg("step") = 256, py::arg("fetch_timeout") = 30.0, py::arg("versions") = 1)
      .def("step", &PyEngine::step, py::arg("tokens"))
      .def("rewind", &PyEngine::rewind, py::arg("position") = 0)
      .def("prepare", &PyEngine::prepare, py::arg("snapshot"))
      .def("adopt", &PyEngine::adopt, py::arg("snapshot"))
      .def_property_readonly("position", &PyEngine::position)
      .def("stats", &PyEngine::stats)
      .def_property_readonly("description", &PyEngine::description)
      .def("close", &PyEngine::close)
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyEngine& self, const py::object&, const py::object&, const py::object&) { self.close(); }, py::arg("type"), py::arg("value"),
           py::arg("traceback"));
}

}  // namespace paramwire::bindings
