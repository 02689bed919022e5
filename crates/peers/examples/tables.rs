//! Prints the table of page tables: `cargo run --release -p pageferry-peers --example tables [quick]`.

use pageferry_peers::tables::{Config, run};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = match std::env::args().nth(1).as_deref() {
        Some("quick") => Config::quick(),
        _ => Config::default(),
    };
    let report = run(&config, &mut |doing| eprintln!("{doing}"))?;
    print!("{report}");
    Ok(())
}
