# ./dev demo: what the cache formats cost and save, on a real model and a real text.

DEMO_FORMATS=bf16,int8,fp8_e4m3,int8/int4,nvfp4,nvfp4:auto,int4:auto,int4_affine,mxfp4:auto

help_demo() {
  cat <<'END'
Compares cache formats on a small model, lets it speak from the smallest good one, writes a report.

usage: ./dev demo

Builds the tool, downloads the model once (94 MiB), scores 2 windows of 2048 tokens of the Debian
policy per format, and ends with the place of the HTML report. About six minutes on two cores.
END
}

cmd_demo() {
  (($# == 0)) || bad_usage demo "unknown option '$1'"
  ensure_packages
  ensure_model
  ensure_text
  build_preset release

  local kvx=build/release/tools/kvx/kvx model report figures
  model=$(model_path)
  report=$(cache_dir)/demo-report.html
  figures=build/release/demo.json
  step "Comparing cache formats"
  "$kvx" compare -m "$model" -f "$(text_path)" --formats "$DEMO_FORMATS" --ctx 2048 --chunks 2 \
    --json "$figures" --html "$report"
  did "compared ${DEMO_FORMATS//,/, }"

  local cache
  cache=$(/usr/bin/python3 tools/dev/smallest_good_cache.py "$figures")
  step "An answer from the smallest cache that costs less than 2 % of perplexity: $cache"
  "$kvx" run -m "$model" -n 80 --cache "$cache" \
    -p "Why do language models keep the keys and values of earlier tokens?"
  did "the model spoke from $cache"
  did "report: $report"
  summary
}
