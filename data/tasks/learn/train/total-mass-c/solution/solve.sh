sqlite3 c.db 'select sum(mass) from t' > answer.txt
