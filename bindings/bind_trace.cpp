#include "convert.hpp"
#include "gil.hpp"
#include "metrics.hpp"
#include "module.hpp"

#include "paramwire/base/trace.hpp"

#include <memory>
#include <string>

namespace paramwire::bindings {

namespace {
constexpr double kNsPerSecond = 1e9;
double in_seconds(std::uint64_t ns) { return static_cast<double>(ns) / kNsPerSecond; }
}  // namespace

py::dict durations_dict(const NamedHistograms& histograms) {
  const py::object type = python_type("Durations");
  py::dict out;
  for (const auto& [name, histogram] : histograms) {
    py::tuple buckets(histogram.buckets.size());
    for (std::size_t i = 0; i < histogram.buckets.size(); ++i) {
      buckets[i] = py::make_tuple(in_seconds(histogram.buckets[i].upper), histogram.buckets[i].count);
    }
    out[text(name)] = type(histogram.count, in_seconds(histogram.sum), buckets);
  }
  return out;
}

void bind_trace(py::module_& module) {
  py::class_<Trace, std::shared_ptr<Trace>>(module, "Trace")
      .def(py::init([](std::size_t events) { return take(Trace::create(events)); }), py::arg("events"))
      .def_property_readonly("recorded", &Trace::recorded)
      .def_property_readonly("dropped", &Trace::dropped)
      .def("json", [](const Trace& trace) { return without_gil([&] { return trace.json(); }); });
}

}  // namespace paramwire::bindings
