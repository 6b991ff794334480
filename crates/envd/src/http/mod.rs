//! The HTTP side: listening, routing, bodies and answers.

pub mod answer;
pub mod body;
pub mod route;
pub mod server;
