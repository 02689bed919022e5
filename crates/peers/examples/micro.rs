//! Prints the table: `cargo run --release -p pageferry-peers --example micro [quick | SLOTS..]`.

use pageferry_peers::{Config, run};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let config = match words.first().map(String::as_str) {
        None => Config::default(),
        Some("quick") => Config::quick(),
        Some(_) => Config {
            sizes: words.iter().map(|w| w.parse()).collect::<Result<_, _>>()?,
            ..Config::default()
        },
    };
    let report = run(&config, &mut |doing| eprintln!("{doing}"))?;
    print!("{report}");
    Ok(())
}
