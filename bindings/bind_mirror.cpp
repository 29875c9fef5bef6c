#include "arrays.hpp"
#include "calls.hpp"
#include "client.hpp"
#include "module.hpp"

#include "paramwire/base/text.hpp"
#include "paramwire/client/mirror.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace paramwire::bindings {

namespace {

class PyMirror {
 public:
  PyMirror(const PyClient& client, const MirrorOptions& options, const CallOptions& call)
      : mirror_(take(interruptible([core = client.core(), options, call]() -> Result<std::shared_ptr<Mirror>> {
          PARAMWIRE_TRY(mirror, Mirror::open(core->client, options, call));
          return std::shared_ptr<Mirror>(std::move(mirror));
        }))) {}
  ~PyMirror() {
    without_gil([this] { mirror_.reset(); });
  }

  py::object update(py::handle timeout) {
    return version_object(take(interruptible([mirror = mirror_, call = CallOptions{micros(timeout, "timeout")}] { return mirror->update(call); })));
  }
  py::object version() const { return version_object(mirror_->state()->version); }
  std::size_t size() const { return mirror_->state()->tensors.size(); }
  py::list names() const {
    py::list out;
    for (const auto& [name, tensor] : mirror_->state()->tensors) out.append(text(name));
    return out;
  }
  bool contains(const std::string& name) const { return mirror_->state()->tensors.contains(name); }
  // Keeps the tensor's bytes, and nothing else of that version.
  py::array get(const std::string& name) const {
    const auto state = mirror_->state();
    const auto found = state->tensors.find(name);
    if (found == state->tensors.end()) raise(Error(Code::kNotFound, cat("tensor \"", name, "\" is not in this mirror of version ", state->version)));
    auto held = std::make_unique<std::shared_ptr<const Mirror::Tensor>>(found->second);
    const Mirror::Tensor& tensor = **held;
    const py::capsule base(held.get(), [](void* kept) { delete static_cast<std::shared_ptr<const Mirror::Tensor>*>(kept); });
    static_cast<void>(held.release());  // the capsule's from here on
    return array_over(tensor.dtype, tensor.shape, tensor.bytes.data(), base);
  }
  py::object tensor_version(const std::string& name) const {
    const auto state = mirror_->state();
    const auto found = state->tensors.find(name);
    if (found == state->tensors.end()) raise(Error(Code::kNotFound, cat("tensor \"", name, "\" is not in this mirror of version ", state->version)));
    return version_object(found->second->version);
  }
  py::dict stats() const {
    const MirrorStats stats = mirror_->stats();
    py::dict out;
    for (const auto& [name, value] : {std::pair("updates", stats.updates), {"kept_bytes", stats.kept_bytes}, {"deltas", stats.deltas}, {"delta_bytes", stats.delta_bytes},
                                      {"replaced_bytes", stats.replaced_bytes}, {"saved_bytes", stats.saved_bytes()}, {"refused", stats.refused}, {"fetched", stats.fetched},
                                      {"fetched_bytes", stats.fetched_bytes}}) {
      out[name] = value;
    }
    return out;
  }

 private:
  std::shared_ptr<Mirror> mirror_;
};

}  // namespace

void bind_mirror(py::module_& module) {
  py::class_<PyMirror>(module, "Mirror", py::is_final())
      .def(py::init([](const PyClient& client, const std::optional<std::vector<std::string>>& tensors, bool deltas, double delta_wait, std::optional<unsigned> threads,
                       py::handle timeout) {
             MirrorOptions options;
             if (tensors) {
               if (tensors->empty()) raise_invalid("tensors is empty: name some, or leave it out for all");
               options.tensors = *tensors;
             }
             options.deltas = deltas;
             options.delta_wait = micros_required(delta_wait, "delta_wait");
             options.threads = threads.value_or(0);
             return std::make_unique<PyMirror>(client, options, CallOptions{micros(timeout, "timeout")});
           }),
           py::arg("client"), py::arg("tensors") = py::none(), py::kw_only(), py::arg("deltas") = true, py::arg("delta_wait") = 0.5, py::arg("threads") = py::none(),
           py::arg("timeout") = py::none())
      .def("update", &PyMirror::update, py::kw_only(), py::arg("timeout") = py::none())
      .def("tensor_version", &PyMirror::tensor_version, py::arg("name"))
      .def("names", &PyMirror::names)
      .def("stats", &PyMirror::stats)
      .def_property_readonly("version", &PyMirror::version)
      .def("__len__", &PyMirror::size)
      .def("__contains__", &PyMirror::contains, py::arg("name"))
      .def("__getitem__", &PyMirror::get, py::arg("name"));
}

}  // namespace paramwire::bindings
