//! The output of `demand-paging`, for programs and for people.

use crate::support::bench;
use pageferry_testkit::skip;

/// The exit code of a host whose cores are busy with other work.
const BUSY: i32 = 15;

fn tiny<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let common = [
        "demand-paging",
        "--memory-per-vcpu",
        "256K",
        "--repeat",
        "2",
    ];
    let common = common.iter().chain(if more.contains(&"--model") {
        &[][..]
    } else {
        &["--quick"]
    });
    common.chain(more).copied().collect()
}

#[test]
fn measured_figures_are_not_modelled_ones() {
    let dir = tempfile::tempdir().expect("a folder");
    let page = dir.path().join("paging.html");
    let shown = page.to_str().expect("a UTF-8 path");
    let ended = bench(&tiny(&[
        "--engine", "soft", "--vcpus", "3,1", "--json", "--report", shown,
    ]));
    ended.assert_ok();
    let json = ended.json();
    let rows = json.as_array().expect("rows");
    let rates = rows
        .iter()
        .filter(|row| row["case"] == "demand_paging.rate");
    let rates: Vec<_> = rates.filter_map(|row| row["subject"].as_str()).collect();
    let parallel = rates
        .iter()
        .filter(|subject| !subject.contains("serialised"));
    let expected = [1, 3].into_iter().flat_map(|vcpus| {
        ["no userfault", "exit"].map(|pages| format!("soft, {pages}, {vcpus} vCPUs"))
    });
    assert!(parallel.copied().eq(expected), "{rates:?}");
    for row in rows {
        let figure = |key: &str| row[key].as_f64().expect("a number");
        assert!(figure("min") > 0.0 && figure("samples") == 2.0, "{row}");
        assert!(
            figure("min") <= figure("value") && figure("value") <= figure("max"),
            "{row}"
        );
    }
    let page = std::fs::read_to_string(&page).expect("the page was written");
    assert!(page.contains("class=\"bar\"") && !page.contains("MODEL"));
}

#[test]
fn a_page_that_cannot_be_written_does_not_cost_the_figures() {
    let ended = bench(&tiny(&[
        "--engine",
        "soft",
        "--vcpus",
        "1",
        "--json",
        "--report",
        "/no/such/place/page.html",
    ]));
    ended.assert_failed(2, "cannot write /no/such/place/page.html");
    assert!(ended.stdout.contains("demand_paging.rate"));
}

#[test]
fn the_options_of_the_kernels_test_print_its_lines() {
    let words =
        "demand-paging --engine soft --quick --repeat 1 -v 2 -b 256K -s shmem -a -k -o -d 1";
    let ended = bench(&words.split(' ').collect::<Vec<_>>());
    ended.assert_ok();
    for line in [
        "Total guest execution time:\t",
        "Per-vcpu demand paging rate:\t",
        "Overall demand paging rate:\t",
    ] {
        let found = ended.stdout.matches(line).count();
        assert_eq!(found, 2, "parallel and serialised: {}", ended.stdout);
    }
}

#[test]
fn options_that_do_not_fit_are_usage_errors() {
    let refused = |more: &[&str], why| bench(&tiny(more)).assert_failed(2, why);
    refused(&["-s", "hugetlb-2m"], "use shmem, shmem-thp or anonymous");
    refused(&["-s", "src_anon"], "unknown backing 'src_anon'");
    refused(&["-u", "missing", "-k"], "leave out -u missing");
    refused(&["--compare-readers", "-r", "2"], "cannot be used with");
    refused(&["-r", "0"], "0 is not in 1..=1024");
    let minor = tiny(&["--engine", "soft", "-u", "minor"]);
    bench(&minor).assert_failed(4, "fault delivery 'minor' is not available");
}

#[test]
fn the_model_says_that_it_is_one() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        skip("cores", "the model needs two cores");
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let page = dir.path().join("model.html");
    let shown = page.to_str().expect("a UTF-8 path");
    let ended = bench(&tiny(&[
        "--model", "--vcpus", "1,64", "--seed", "5", "--json", "--report", shown,
    ]));
    if ended.code == Some(BUSY) && skip("cores", &ended.stderr) {
        return;
    }
    ended.assert_ok();
    let json = ended.json();
    let rows = json.as_array().expect("rows");
    let of = |case: &'static str| rows.iter().filter(move |row| row["case"] == case);
    for input in [
        "guest", "lookup", "map", "missing", "exit", "copy", "lock", "handover", "line",
    ] {
        let case = format!("model.{input}");
        assert_eq!(
            rows.iter().filter(|row| row["case"] == case).count(),
            1,
            "{case}"
        );
    }
    assert_eq!(of("model.check").count(), 8);
    for case in [
        "model.time",
        "model.rate",
        "model.waiting",
        "model.total_time",
    ] {
        assert_eq!(of(case).count(), 8, "{case}");
        for row in of(case) {
            let subject = row["subject"].as_str().expect("a subject");
            assert!(subject.starts_with("MODELLED: "), "{row}");
        }
    }
    let page = std::fs::read_to_string(&page).expect("the page was written");
    assert!(page.contains("MODELLED"));
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    bench(&["demand-paging", "--vcpus", "0"]).assert_failed(2, "0 is not in 1..=1024");
    bench(&["demand-paging", "--seed", "1"]).assert_failed(2, "required arguments");
    bench(&["demand-paging", "--model", "--overlap"]).assert_failed(2, "cannot be used with");
    let much = |vcpus| {
        let words = [
            "demand-paging",
            "--engine",
            "soft",
            "--memory-per-vcpu",
            "1T",
            "--vcpus",
            vcpus,
        ];
        bench(&words)
    };
    much("1").assert_failed(2, "choose a smaller");
    much("64").assert_failed(2, "more memory than a guest can address");
}
