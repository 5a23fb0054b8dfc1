// The parts of kvx._core; module.cpp calls each once.
#pragma once

#include <nanobind/nanobind.h>

namespace kvx::python {

void bind_formats(nanobind::module_& module);
void bind_rows(nanobind::module_& module);
void bind_paged_step(nanobind::module_& module);
void bind_paged_cache(nanobind::module_& module);
void bind_paged_layer(nanobind::module_& module);
void bind_paged_window(nanobind::module_& module);
void bind_contiguous_cache(nanobind::module_& module);
void bind_cache_files(nanobind::module_& module);
void bind_block_files(nanobind::module_& module);
void bind_host_blocks(nanobind::module_& module);
void bind_block_store(nanobind::module_& module);
void bind_stores(nanobind::module_& module);
void bind_quality(nanobind::module_& module);
void bind_tune(nanobind::module_& module);
void bind_turbomind(nanobind::module_& module);
void bind_engine_layer(nanobind::module_& module);
void bind_metrics(nanobind::module_& module);
void bind_folder_server(nanobind::module_& module);

}  // namespace kvx::python
